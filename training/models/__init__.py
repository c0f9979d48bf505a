"""Language models: classes, initial weights, attention, loss, freezing."""
