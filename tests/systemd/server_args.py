"""The flags of the stand-in engine, declared as the engine declares its own; read by syntax tree, never run."""

import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--served-model-name", type=str)
        parser.add_argument("--host", type=str, default="127.0.0.1")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--attention-backend", type=str, choices=["flashinfer", "triton"])
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--cuda-graph-max-bs", type=int)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--speculative-algorithm", type=str, choices=["DFLASH", "DDTREE", "EAGLE"])
        parser.add_argument("--speculative-draft-model-path", type=str)
        parser.add_argument("--speculative-dflash-block-size", type=int)
        parser.add_argument("--speculative-ddtree-budget", type=int)
        parser.add_argument("--speculative-ddtree-topk", type=int)
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--disable-custom-all-reduce", action="store_true")
        parser.add_argument("--config", type=str)
        parser.add_argument("--chat-template", type=str)
        parser.add_argument("--json-model-override-args", type=str, default="{}")
