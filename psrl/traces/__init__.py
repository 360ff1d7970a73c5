"""Read, import, synthesise and describe traces of training samples."""
