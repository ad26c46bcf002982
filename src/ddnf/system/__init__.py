"""Files and optional libraries; imports nothing else of ours."""
