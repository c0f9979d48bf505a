"""The engines that generate text from a model, and the choice between them."""
