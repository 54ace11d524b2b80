"""All that a layer does between its projections."""
