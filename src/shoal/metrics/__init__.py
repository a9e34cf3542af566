"""What evaluation measures, exactly, whatever the number of workers."""
