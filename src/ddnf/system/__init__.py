"""Files and optional libraries."""
