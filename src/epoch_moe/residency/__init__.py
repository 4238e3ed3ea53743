"""Expert residency: a model whose experts do not all fit in fast memory keeps the ones that the next forwards need."""
