"""What people and pipelines run: command line, campaigns, workers, reports, doctor, bench."""
