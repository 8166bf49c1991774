"""One function per property and step: `check_…(step) -> Finding | None`. Which property each belongs to, and
the order in which they are asked, stands in `kvproof.properties.catalogue`."""
