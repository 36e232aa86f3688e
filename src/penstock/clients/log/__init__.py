"""Reading a log by offset, writing one without a pipeline, and groups of readers that share one."""

from penstock.clients.log.aio import AsyncLogReader, AsyncLogWriter
from penstock.clients.log.reader import LogReader
from penstock.clients.log.slices import LogInfo, LogSlice
from penstock.clients.log.writer import LogWriter
from penstock.clients.log.writing import Evicted, NewRecord

__all__ = ["AsyncLogReader", "AsyncLogWriter", "Evicted", "LogInfo", "LogReader", "LogSlice", "LogWriter", "NewRecord"]
