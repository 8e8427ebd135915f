"""The arithmetic of a layer, kind by kind: ``plain`` uses the framework's own operations."""
