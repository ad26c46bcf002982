"""One training loop for every objective: resumable, guarded against NaN."""
