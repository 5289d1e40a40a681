"""Finds descriptors for server reflection, methods by their full name included.

The protocol asks for that (`package.Service.Method` is a symbol) and ghz does too; the default pool
knows files, messages, enums and services only. Not here: the reflection service itself.
"""

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor


class SymbolPool:
    """The part of a descriptor pool that reflection uses, over the default pool."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Raises KeyError for an unknown name."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def FindFileByName(self, name: str) -> FileDescriptor:
        """Raises KeyError for a file that was never imported."""
        return self._pool.FindFileByName(name)

    def FindMessageTypeByName(self, name: str) -> Descriptor:
        """Raises KeyError for an unknown message."""
        return self._pool.FindMessageTypeByName(name)

    def FindExtensionByNumber(self, message: Descriptor, number: int) -> FieldDescriptor:
        """Raises KeyError where the message has no such extension."""
        return self._pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Descriptor) -> list[FieldDescriptor]:
        """All extensions of a message that are known here."""
        return self._pool.FindAllExtensions(message)
