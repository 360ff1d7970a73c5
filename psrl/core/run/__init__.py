"""What a run is configured by and what it leaves behind: set-up, events, metrics, directory."""
