"""What ranks measure of devices and of the links between them."""
