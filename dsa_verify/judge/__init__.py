"""How outputs are compared on the device: field by field, and by the laws that every schedule keeps."""
