"""What attention over packed prefix trees is: rule, reference, CPU paths, stores."""
