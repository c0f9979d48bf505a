"""Any model on any text."""
