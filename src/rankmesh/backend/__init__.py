"""Everything of torch's process groups that is private or depends on the release of torch."""
