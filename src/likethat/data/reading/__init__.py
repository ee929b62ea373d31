"""What a picture file holds besides 8-bit pixels: pages, other ranges of values, DICOM."""
