"""Layout of a drive: superblock, free blocks, index records and access to the device."""
