"""Files on object stores and remote file systems, by URL: reached with retries, in parts, through a local cache.

    addresses       is a text a URL; join, check and shorten URLs
    retries         repeat a request that failed for a while
    remote_store    one URL as a folder of files: list, read, write, remove
    part_upload     a file of any size, in parts that are not sent twice
    part_download   a file of any size, in parts that are not fetched twice
    cache_folder    the local copies: their folder, their limit
    fetched_files   the files of a URL as local files

fsspec and the packages of its file systems (s3fs for `s3://`) are imported when a URL is opened.
"""
