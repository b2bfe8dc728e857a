"""File access: `untrusted` reads files from untrusted sources, `output` writes below a folder of kumi's own."""
