"""Conversations as training samples, with the loss on the assistant's tokens.

Example:
    dataset = ChatDataset(rows, tokenizer)
    trainer.train(dataset, collate_fn=DataCollatorForSeq2Seq(tokenizer), ...)
"""

from loopwright.data.chats.dataset import ChatDataset
from loopwright.data.chats.encoder import ChatEncoder, EncodedChat
from loopwright.data.chats.renderer import Renderer
from loopwright.data.chats.templates import BUILT_IN, ChatTemplate, resolve_template

__all__ = ["BUILT_IN", "ChatDataset", "ChatEncoder", "ChatTemplate", "EncodedChat", "Renderer", "resolve_template"]
