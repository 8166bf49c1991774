"""The trace format, and the stored traces: cases from the field and faults found in releases."""
