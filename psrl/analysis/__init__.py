"""Turn run directories into tables, figures and reports."""
