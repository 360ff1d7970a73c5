"""What a worker holds from batch to batch."""
