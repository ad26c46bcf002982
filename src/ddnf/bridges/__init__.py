"""Bridges to the tools that people already use; each imports its library when it is used."""
