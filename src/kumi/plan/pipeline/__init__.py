"""Pipeline stages, and how long a pipeline schedule takes."""
