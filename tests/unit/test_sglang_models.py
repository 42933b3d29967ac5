"""Every model that the pinned SGLang serves is mapped, or stands here with the reason why it is not.

A new version of SGLang, with further models, fails here until somebody has looked at them.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from slipstream.bridge.families import FAMILIES
from slipstream.bridge.families.missing import EXAMINED
from slipstream.configs.installed.served import model_files
from slipstream.rollout.engine.model_limits import TIED_ONLY, UNTIED_ONLY

MAPPED = {
    "ArceeForCausalLM": "arcee",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Ernie4_5_ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "LlamaForCausalLM": "llama",
    "MiMoForCausalLM": "mimo",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "StableLmForCausalLM": "stablelm",
}
"""The ``model_type`` of each architecture that is mapped."""

LACKING = {
    "AfmoeForCausalLM": "afmoe",
    "ApertusForCausalLM": "apertus",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "CohereForCausalLM": "cohere",
    "DbrxForCausalLM": "dbrx",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "FalconH1ForCausalLM": "falcon_h1",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "InternLM3ForCausalLM": "internlm3",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LongcatFlashForCausalLM": "longcat_flash",
    "Mamba2ForCausalLM": "mamba2",
    "MiniCPMForCausalLM": "minicpm",
    "Ministral3ForCausalLM": "ministral3",
    "MllamaForConditionalGeneration": "mllama",
    "NemotronHForCausalLM": "nemotron_h",
    "OPTForCausalLM": "opt",
    "OlmoForCausalLM": "olmo",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""The ``model_type`` of each architecture of which ``families/missing.py`` knows what the bridge lacks."""

NO_POLICY = """
    BertForSequenceClassification BertModel CLIPModel Contriever EmbeddingGemmaModel
    Gemma2ForSequenceClassification InternLM2ForRewardModel Lfm2BidirectionalModel LlamaEmbeddingModel
    LlamaForClassification LlamaForSequenceClassification LlamaForSequenceClassificationWithNormal_Weights
    MistralModel NanbeigeForSequenceClassification PixtralVisionModel Qwen2ForRewardModel
    Qwen2ForSequenceClassification Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model
    WhisperForConditionalGeneration XLMRobertaForSequenceClassification XLMRobertaModel
    """
"""Encoders, embeddings, classifiers and reward models."""

DRAFTS = """
    BailingMoeForCausalLMNextN DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM DSparkDraftModel
    DeepseekV3ForCausalLMNextN DeepseekV4ForCausalLMDSpark DeepseekV4ForCausalLMNextN
    Dots3NoteForCausalLMNextN Eagle3DeepseekV2ForCausalLM Ernie4_5_MoeForCausalLMMTP
    ExaoneMoEForCausalLMMTP Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
    GigaChat35ForCausalLMNextN Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLMNextN
    Glm5NextForConditionalGenerationNextN GlmMoeDsaForCausalLMNextN GlmOcrForConditionalGenerationNextN
    HYV3ForCausalLMNextN HYV4ForCausalLMNextN IQuestQ1MTP InklingForConditionalGenerationMTP
    Lfm2DSparkDraftModel LiLiCorrDraftModel LingDSparkModel LlamaForCausalLMEagle LlamaForCausalLMEagle3
    LongcatFlashForCausalLMNextN MiMoMTP MiMoV2MTP MistralForCausalLMEagle MistralLarge3ForCausalLMEagle
    MuseGlimmerAssistantModel NemotronHForCausalLMMTP Qwen2ForCausalLMEagle Qwen3DSparkModel
    Qwen3MoeForCausalLMMTP Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP Step3p5MTP
    """
"""Models that guess tokens ahead of another one."""

WRAPPERS = """
    MindSporeForCausalLM QuantMixtralForCausalLM TorchNativeLlamaForCausalLM TorchNativePhi3ForCausalLM
    TransformersEmbeddingModel TransformersForCausalLM TransformersForSequenceClassification
    TransformersMoEEmbeddingModel TransformersMoEForCausalLM TransformersMoEForSequenceClassification
    TransformersMultiModalEmbeddingModel TransformersMultiModalForCausalLM
    TransformersMultiModalForSequenceClassification TransformersMultiModalMoEEmbeddingModel
    TransformersMultiModalMoEForCausalLM TransformersMultiModalMoEForSequenceClassification
    """
"""Other implementations of models that are served by classes of their own."""

NOT_COMPARED_MULTIMODAL = """
    BailingMM2NativeForConditionalGeneration BailingMMNativeForConditionalGeneration
    BailingMoeV3VLForConditionalGeneration Cohere2VisionForConditionalGeneration
    Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration DeepseekOCRForCausalLM
    DeepseekVL2ForCausalLM DotsOCRForCausalLM DotsVLMForCausalLM Ernie4_5_VLMoeForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration
    Glm5NextForConditionalGeneration GlmAsrForConditionalGeneration GlmImageForConditionalGeneration
    GlmOcrForConditionalGeneration InklingForConditionalGeneration InternS1ForConditionalGeneration
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration InternVLChatModel JetVLMForConditionalGeneration
    KimiK3ForConditionalGeneration KimiVLForConditionalGeneration Lfm2VlForConditionalGeneration
    LightOnOCRForConditionalGeneration LlavaForConditionalGeneration LlavaLlamaForCausalLM
    LlavaMistralForCausalLM LlavaQwenForCausalLM LlavaVidForCausalLM LocateAnythingForConditionalGeneration
    MiDashengLMModel MiMoV2ASRForCausalLM MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration
    MiniMaxM3SparseForConditionalGeneration MossVLForConditionalGeneration MultiModalityCausalLM
    MuseGlimmerForConditionalGeneration NVILAForConditionalGeneration NVILALiteForConditionalGeneration
    NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 POINTSV15ChatModel
    PaddleOCRVLForConditionalGeneration Phi4MMForCausalLM PixtralForConditionalGeneration
    Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration
    Qwen3OmniMoeForConditionalGeneration Qwen4ExpForConditionalGeneration
    Sarashina2VisionForCausalLM Step3VLForConditionalGeneration Step3p7ForConditionalGeneration
    StepVLForConditionalGeneration UnlimitedOCRForCausalLM VoxtralForConditionalGeneration YiVLForCausalLM
    """
"""Models that read more than text and whose code was not compared part by part."""

NOT_COMPARED = """
    BaichuanForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM ChatGLMModel DeciLMForCausalLM DeepseekForCausalLM
    DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM
    FalconMambaForCausalLM GPTBigCodeForCausalLM GPTJForCausalLM GigaChat35ForCausalLM
    GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM
    Grok1ForCausalLM Grok1ModelForCausalLM HYV3ForCausalLM HYV4ForCausalLM HrmTextForCausalLM
    IQuestCoderForCausalLM IQuestLoopCoderForCausalLM IQuestQ1ForCausalLM InternLM2ForCausalLM
    JetNemotronForCausalLM K2HorizonForCausalLM KimiK3LinearForCausalLM LLaDA2MoeModelLM LagunaForCausalLM
    Lfm2MoeForCausalLM MambaForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM
    MiniCPM3ForCausalLM MiniCPMSALAForCausalLM MiniMaxM3SparseForCausalLM MistralLarge3ForCausalLM
    MuseGlimmerForCausalLM NanbeigeForCausalLM NemotronHPuzzleForCausalLM OrionForCausalLM
    PersimmonForCausalLM Phi3SmallForCausalLM QWenLMHeadModel SDARForCausalLM SDARMoeForCausalLM
    SarvamMLAForCausalLM SarvamMoEForCausalLM SolarForCausalLM Spark2_5ForCausalLM Step3p5ForCausalLM
    TeleFLMForCausalLM XllmForCausalLM XverseForCausalLM XverseMoeForCausalLM ZayaForCausalLM
    """
"""Decoders whose code was not compared part by part: a config of theirs is refused as not examined."""


def registry() -> Iterator[str]:
    """Yield the architectures that SGLang's files register."""
    for file in model_files():
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EntryClass":
                value = statement.value
                for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
                    yield ast.unparse(each)


@cache
def classes() -> dict[str, ast.ClassDef]:
    statements = (each for file in model_files() for each in ast.parse(file.read_text()).body)
    return {each.name: each for each in statements if isinstance(each, ast.ClassDef)}


def own_code(architecture: str) -> str:
    """The code of a class and of those of SGLang's that it inherits from."""
    found, left = [], [architecture]
    while left:
        if (definition := classes().get(left.pop())) is not None:
            found.append(ast.unparse(definition))
            left += [ast.unparse(base) for base in definition.bases]
    return "\n".join(found)


def test_every_model_of_sglang_is_mapped_or_has_a_reason():
    groups = [*MAPPED, *LACKING]
    for names in (NO_POLICY, DRAFTS, WRAPPERS, NOT_COMPARED_MULTIMODAL, NOT_COMPARED):
        groups += names.split()
    assert len(groups) == len(set(groups))
    assert set(groups) == set(registry())


@pytest.mark.parametrize("architecture", MAPPED)
def test_what_is_said_to_be_mapped_is(architecture):
    assert MAPPED[architecture] in FAMILIES


def test_of_what_lacks_parts_the_parts_are_known():
    assert set(LACKING.values()) <= EXAMINED - FAMILIES.keys()


def test_the_models_whose_head_is_never_tied_are_known():
    """They make a head, and do not ask their config whether it is the embedding."""
    never_tied = {
        family
        for architecture, family in MAPPED.items()
        if "ParallelLMHead(" in own_code(architecture) and "tie_word_embeddings" not in own_code(architecture)
    }
    assert never_tied == UNTIED_ONLY


def test_the_models_whose_stored_head_is_passed_over_are_known():
    """Their loaders leave out a head, whatever the config says. That of gemma3 is gemma3_text's."""
    passed_over = {
        family
        for architecture, family in MAPPED.items()
        if re.search(r"if 'lm_head.weight' in name:\n\s+continue", own_code(architecture))
    }
    assert passed_over | {"gemma3"} == TIED_ONLY
