"""What happened in a run: recorded as it runs, kept in a file, drawn and explained."""
