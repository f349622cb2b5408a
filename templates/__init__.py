"""Jinja templates: the shape of each kernel; the statements come from codegen.emit."""
