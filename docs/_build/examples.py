"""Griffe extension: an `Example:` of a docstring is shown as code, as mkdocstrings does for `Examples:`."""

from griffe import Extension


class Examples(Extension):
    """Gives the section the name that mkdocstrings knows."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
