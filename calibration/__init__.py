"""Text to token batches, observers, the calibration table, the shipped corpus."""

from quantdiff.calibration.text import TextWindows, check_vocabulary, read_documents, text_windows

__all__ = ["TextWindows", "check_vocabulary", "read_documents", "text_windows"]
