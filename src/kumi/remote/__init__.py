"""Files on object stores and remote file systems, by URL: reached with retries, in parts, through a local cache.

    addresses       recognise, check, join and shorten URLs
    retries         repeat requests that fail for a passing reason
    remote_store    one URL as a folder of files: list, read, write, remove
    part_upload     upload a file of any size, in parts that are not sent twice
    part_download   download a file of any size, in parts that are not fetched twice
    cache_folder    the local copies: their folder, their limit
    fetched_files   the files of a URL as local files

fsspec and the packages of its file systems (s3fs for `s3://`) are imported when a URL is opened.
"""
