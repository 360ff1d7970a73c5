"""One rank at work: inputs, pipeline, loss, stored keys and values, optimizer."""
