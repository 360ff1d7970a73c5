"""From samples on ranks to micro-batches, op order and cached blocks of every rank."""
