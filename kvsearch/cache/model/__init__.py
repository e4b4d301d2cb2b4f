"""What a cache reads of a model: angles, output projections, which tokens are anchors."""
