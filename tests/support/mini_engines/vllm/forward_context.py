_context = None


def is_forward_context_available():
    return _context is not None


def get_forward_context():
    return _context


def set_forward_context(context):
    global _context
    _context = context
