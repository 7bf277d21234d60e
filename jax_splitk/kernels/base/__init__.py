"""What all kernel families are made of: families, work and cost, splits of a reduction, geometry, refusals."""
