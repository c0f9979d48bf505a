"""Language models: classes, first weights, loss, freezing."""
