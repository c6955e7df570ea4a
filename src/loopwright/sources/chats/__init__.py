"""Conversations in the common row formats, as one kind of value.

`read_chat(row)` accepts `messages`, ShareGPT's `conversations`, `prompt`/`completion` and
`instruction`/`input`/`output`; lists may be JSON in a cell of a csv or parquet file. A row that is not a conversation
is an `InputError`.

Example:
    chat = read_chat({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})
"""

from loopwright.sources.chats.formats import Chat, chat_format, is_trained, read_chat

__all__ = ["Chat", "chat_format", "is_trained", "read_chat"]
