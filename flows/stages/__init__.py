"""Each stage of a flow as a Prefect task."""
