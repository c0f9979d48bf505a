"""Export formats, their parity with the checkpoint, and their speed."""
