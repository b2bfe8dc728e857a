"""The door between kumi and the disk: `untrusted` reads files that others made, `output` writes below a folder."""
