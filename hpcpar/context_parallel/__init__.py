"""Context parallelism: attention over a sequence of which each rank holds a part."""
