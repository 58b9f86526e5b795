"""The pieces that the columns of a row are held in (`device/tiles.py`)."""


def pieces(width: int) -> tuple[int, int]:
    """Return the pieces of a row, powers of two of at least 16: one, or two if their sum is less.

    192 is 128 + 64 and not 256; 80 is 64 + 16; 120 is 128 + 0.
    """
    one_piece = max(16, 1 << (width - 1).bit_length()) if width else 16
    half = one_piece // 2
    rest = max(16, 1 << (width - half - 1).bit_length()) if width > half else 16
    return (half, rest) if half >= 16 and half + rest < one_piece else (one_piece, 0)
