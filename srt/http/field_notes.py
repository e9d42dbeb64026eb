"""What the fields of request bodies mean, in a sentence each, for `/openapi.json` and `/docs`.

A field means the same in every protocol that has it, so most notes stand under its name alone; one
that differs stands under `Schema.field`. Which values a field takes is said by its type.
"""

from __future__ import annotations

import re
from inspect import get_annotations
from typing import Any, Final

import msgspec

_CONSTRAINTS: Final = {
    "structured_outputs": "A constraint in vLLM's spelling: one of its kinds.",
    "json_schema": "The output satisfies this JSON schema, or the text of one.",
    "regex": "The whole output matches this regular expression.",
    "ebnf": "The output is derived from `root` of this grammar.",
    "grammar": "A grammar, or `type` and `value` of a regex or a schema as TGI has it.",
    "format": '`"json"` for any JSON object, or the schema of one.',
    "guided_json_object": "True for any JSON object.",
    "guided_regex": "As `regex`.",
    "guided_choice": "The output is exactly one of these strings.",
    "guided_grammar": "As `ebnf`.",
    "guided_whitespace_pattern": "Refused; see `constraint_whitespace`.",
    "guided_decoding_backend": "Accepted; the server chooses the grammar engine.",
    "constraint_prefix": "The end of the prompt that belongs to the constrained text, or true for "
    "all of it.",
    "constraint_after": "The constraint begins behind the first such text in the output.",
    "constraint_whitespace": "The layout of JSON between its tokens.",
    "jump_forward": "Whether what the constraint forces is appended without asking the model.",
}
_SAMPLING: Final = {
    "temperature": "0 takes the likeliest token; more makes the output more varied.",
    "top_p": "Draw from the likeliest tokens that have this share together.",
    "top_k": "Draw from so many of the likeliest tokens; -1 is all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest.",
    "seed": "With it the same request has the same answer, whatever else runs.",
    "n": "How many answers; answer `i` draws with `seed + i`.",
    "best_of": "Generate so many answers, give the `n` with the highest mean logprob.",
    "presence_penalty": "Taken from the logit of every token that has been generated.",
    "frequency_penalty": "Taken from it for each time that it has been generated.",
    "repetition_penalty": "More than 1 makes tokens of the prompt and the output less likely.",
    "logit_bias": "Token id → what is added to its logit.",
    "allowed_token_ids": "No other tokens are drawn.",
    "bad_words": "Texts that are not in the answer, however they would be split into tokens.",
    "max_tokens": "The most tokens of output.",
    "max_completion_tokens": "The most tokens of output, thoughts among them; as `max_tokens`.",
    "min_tokens": "No end before so many tokens.",
    "ignore_eos": "The end token does not end the output.",
    "stop": "Texts that end the output and are not in it.",
    "stop_sequences": "Texts that end the output and are not in it.",
    "stop_token_ids": "Tokens that end the output.",
    "stop_regex": "Patterns; the first character that completes a match ends the output.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "no_stop_trim": "As `include_stop_str_in_output`.",
    "skip_special_tokens": "False shows control tokens in the text.",
    "spaces_between_special_tokens": "Accepted; text is what the tokens say.",
    "sampling_params": "How is drawn and when the output ends; a list has one for each prompt.",
    "options": "How is drawn, and how long the output may get.",
}
_PROMPT: Final = {
    "model": "The served model's name, or nothing.",
    "messages": "The conversation, oldest message first.",
    "system": "Instructions before the conversation.",
    "instructions": "Instructions before the conversation, for this response only.",
    "prompt": "A text, token ids, or where several are answered a list of either.",
    "input": "What is read.",
    "input_ids": "The prompt as token ids.",
    "suffix": "The text behind the gap that is to be filled; for models trained for it.",
    "echo": "Repeat the prompt before the answer.",
    "documents": "Documents for the chat template, if it has a place for them.",
    "chat_template_kwargs": "Variables of the chat template.",
    "add_generation_prompt": "Open the assistant's turn behind the messages; true if absent.",
    "continue_final_message": "Go on with the last message, the assistant's.",
    "truncate_prompt_tokens": "Keep so many tokens of the prompt; -1 as many as fit.",
    "truncation_side": "The side of the prompt that is cut; `left` if absent.",
    "add_special_tokens": "False leaves out the opening token.",
    "prediction": "Accepted; the answer is the same without.",
    "tools": "The functions that the model may call.",
    "tool_choice": "Whether a tool is called, and which.",
    "parallel_tool_calls": "False allows one call at most.",
    "context": "`context` of an earlier reply, to go on from there.",
    "raw": "The prompt is put to the model without a template.",
    "previous_response_id": "The stored response that this one goes on from.",
    "truncation": "`auto` leaves out the oldest turns of a conversation that is too long.",
    "cache_control": "Accepted; all prompts are cached.",
}
_REASONING: Final = {
    "reasoning_effort": "`none` turns thinking off, any other value on.",
    "thinking_token_budget": "The most tokens of thoughts; then their end is forced.",
    "separate_reasoning": "False leaves the thoughts in the text.",
    "stream_reasoning": "False gives the thoughts of a stream in one piece.",
    "include_reasoning": "False leaves the thoughts out.",
    "reasoning": "`effort`, as `reasoning_effort`.",
    "thinking": "Turns thinking on, within a budget, or off.",
    "think": "Whether the model thinks, or how much.",
}
_REPLY: Final = {
    "stream": "Send the answer as it is made.",
    "stream_options": "What else a stream has.",
    "stream_interval": "Put so many tokens into each frame of a stream.",
    "logprobs": "Give the logprobs of the output's tokens.",
    "top_logprobs": "Give the logprobs of so many alternatives to each token.",
    "logprobs_mode": "The model's own, or those of the distribution that is drawn from.",
    "logprob_token_ids": "Tokens whose logprobs are always among the alternatives.",
    "prompt_logprobs": "Give logprobs of the prompt's tokens, with so many alternatives.",
    "return_token_ids": "Give the ids of prompt and output.",
    "return_tokens_as_token_ids": "Write tokens as `token_id:ID` in logprobs.",
    "return_metrics": "Give times and tokens per second.",
    "metadata": "Your own words about the request.",
    "store": "Keep the response, so that it can be asked for and gone on from.",
    "background": "Reply at once; the response is made meanwhile.",
    "include": "What else the reply has.",
    "text": "The text.",
    "output_config": "`format`, a schema that the answer satisfies, and `effort`.",
    "output_format": "As `output_config.format`.",
}
_RUNNING: Final = {
    "rid": "The request's id, yours to choose; `/abort` takes it.",
    "request_id": "As `rid`.",
    "priority": "Higher is served first.",
    "cache_salt": "Share cached prompts with requests of the same salt only.",
    "extra_key": "As `cache_salt`, beside it.",
    "program": "The program that this is a call of; see docs/programs.md.",
    "plan": "What the program does next.",
    "timeout": "Seconds until the request is given up.",
    "user": "Accepted; changes nothing.",
    "safety_identifier": "Accepted; changes nothing.",
    "prompt_cache_key": "Accepted; what is cached is found by the text itself.",
    "prompt_cache_retention": "Accepted; see `/cache/pin`.",
    "service_tier": "Accepted; see `priority`.",
    "keep_alive": "Accepted; the model stays loaded.",
    "tenant": "The tenant that is meant; for admins.",
    "log_metrics": "Accepted; changes nothing.",
    "no_logs": "Accepted; changes nothing.",
    "custom_labels": "Accepted; changes nothing.",
    "routing_key": "Accepted; changes nothing.",
}
_OTHERS: Final = {
    "CompletionRequest.logprobs": "Give the output's logprobs, with so many alternatives.",
    "CompletionRequest.max_tokens": "The most tokens of output; 16 if absent.",
    "ChatRequest.store": "Accepted; chats are not stored.",
    "CompletionRequest.store": "Accepted; completions are not stored.",
    "ResponsesRequest.text": "`format`, a constraint.",
    "ResponsesRequest.max_output_tokens": "The most tokens of output, thoughts among them.",
    "GenerateBody.stream": "False for one reply; a stream if absent.",
    "ChatBody.stream": "False for one reply; a stream if absent.",
    "PullBody.stream": "False for one reply; a stream of progress if absent.",
    "GenerateBody.truncate": "Accepted; a prompt that does not fit is refused.",
    "ChatBody.truncate": "Accepted; a prompt that does not fit is refused.",
    "EmbedBody.truncate": "False refuses a text that is too long, which is cut otherwise.",
    "encoding_format": "Numbers, or base64 of float32.",
    "dimensions": "Only the model's own number.",
    "pooling": "How one vector is made of all tokens'.",
    "normalize": "False leaves the vector's length as it is.",
    "UploadForm.file": "The file.",
    "purpose": "What it is for.",
    "expires_after[anchor]": "What the seconds are counted from.",
    "expires_after[seconds]": "When the file is deleted.",
    "input_file_id": "The file with the requests, a JSON object on each line.",
    "endpoint": "Where all of its requests go.",
    "completion_window": "How long it may take: `30m`, `24h`.",
    "output_expires_after": "When its output is deleted.",
    "ModelBody.name": "As `model`.",
    "PullBody.name": "As `model`.",
    "ModelBody.model": "A model's name.",
    "PullBody.model": "A model's name, or `hf.co/ORG/NAME`.",
    "return_logprob": "Give the logprobs of the output's tokens.",
    "logprob_start_len": "The prompt's token from which on logprobs are given, too; -1 is none.",
    "top_logprobs_num": "Give the logprobs of so many alternatives to each token.",
    "token_ids_logprob": "Give the logprobs of these tokens at each place.",
    "return_text_in_logprobs": "Give the tokens' texts beside their ids.",
    "return_prompt_token_ids": "Give the prompt's ids.",
    "incremental_streaming_output": "A stream's events have what is new, not all so far.",
    "NativeRequest.text": "The prompt, or several.",
    "EncodeRequest.text": "The text, or several.",
    "src_rids": "The requests whose texts are joined.",
    "dst_rid": "The request that they are joined to.",
    "tool_call_parser": "How calls are written: `hermes`, `qwen25`, `llama3`, `mistral`, …",
    "reasoning_parser": "How thoughts are marked: `qwen3`, `deepseek-r1`, …",
    "choices": "The answers to judge.",
    "normalization": "What a choice is judged by.",
    "query": "What stands before each item.",
    "items": "Texts, each put to the model with the query.",
    "label_token_ids": "The tokens whose probabilities are asked for.",
    "apply_softmax": "Probabilities among the labels, not among all tokens.",
    "item_first": "Put the item before the query.",
    "content": "As `text`.",
    "TokenizeRequest.prompt": "As `text`.",
    "parse_special": "False takes control tokens in the text for plain text.",
    "return_token_strs": "Give the tokens' texts, too.",
    "tokens": "The ids.",
    "ExplainRequest.rid": "The id of a request that was served.",
    "PinRequest.name": "The pin's name; made up if absent.",
    "ttl_s": "Seconds that the pin lasts; until it is deleted if absent.",
    "compute": "False pins only what is cached already.",
    "prompts": "Several prompts.",
    "namespace": "A namespace by its name in `/cache/stats`.",
    "steps": "What is done, in order.",
    "variables": "Name → value, there from the start.",
    "defaults": "Fields of each `gen`.",
    "ProgramRequest.program": "The program's id; made up if absent.",
    "policy": "The order of waiting requests.",
    "AbortRequest.rid": "The request's exact id.",
    "abort_all": "True ends all requests.",
    "StreamOptions.include_usage": "Give token counts in the last frame.",
    "StreamOptions.continuous_usage_stats": "Give token counts in every frame.",
    "StreamOptions.include_fields": "Give the values that the JSON so far completes.",
    "PlanFields.remaining": "So many calls are not sent yet; 0 ends the program.",
    "PlanFields.fork": "So many calls go on from this one.",
    "PlanFields.group": "The siblings that this is one of.",
    "PlanFields.width": "How many siblings there are.",
    "PlanFields.next_constraint": "Constraints of calls to come, to be made ready.",
    "NativeSampling.max_new_tokens": "The most tokens of output; 128 if absent.",
    "NativeSampling.min_new_tokens": "No end before so many tokens.",
    "NativeSampling.sampling_seed": "As `seed`.",
}
NOTES: Final = _CONSTRAINTS | _SAMPLING | _PROMPT | _REASONING | _REPLY | _RUNNING | _OTHERS
"""Name of a field, or `Schema.field` → what it means."""

REFUSED: Final = "Refused, unless it asks for nothing."
"""Of a field that has no note: it is there to be refused by its name."""

_SAMPLING_PARTS: Final = ("NativeSampling", "Options", "NextConstraint", "StructuredOutputs")
"""Schemas inside bodies whose fields mean what those of bodies do."""
_ONLY_A_ROUTE: Final = re.compile(r"(`[A-Z]+ /\S+`(, |, and )?)+\.")


def describe_body(name: str, schema: dict[str, Any], type_: type) -> dict[str, Any]:
    """The schema `name` of a whole body of `type_`: every field with its note, the struct's own
    fields before those that it inherits."""
    found = dict(schema)
    if _ONLY_A_ROUTE.fullmatch(found.get("description", "")):
        del found["description"]  # stands above it already
    properties = found["properties"]
    found["properties"] = {
        field: _noted(properties[field], NOTES.get(f"{name}.{field}") or NOTES.get(field, REFUSED))
        for field in _own_first(type_)
    }
    return found


def describe_part(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema inside of bodies or replies: the fields that have a note of their own with it."""
    notes = NOTES if name in _SAMPLING_PARTS else {}
    properties = {
        field: _noted(one, NOTES.get(f"{name}.{field}") or notes.get(field))
        for field, one in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _noted(schema: dict[str, Any], note: str | None) -> dict[str, Any]:
    return schema if note is None or "description" in schema else {**schema, "description": note}


def _own_first(type_: type) -> list[str]:
    """The fields of a struct, as they are encoded: its own, then its base's, and so on."""
    names = {field.name: field.encode_name for field in msgspec.structs.fields(type_)}
    order = [name for cls in type_.__mro__ for name in get_annotations(cls)]
    return [names[name] for name in dict.fromkeys(order) if name in names]
