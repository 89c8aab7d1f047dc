"""What compiled programs really move, keep and hide, on the devices that are here or on described ones."""
