"""Input data: where its time goes, what wins it back, and a loader whose place in the data survives anything.

Public names are resolved on first use, through one literal table; only those of the loader need torch.

>>> import headway.data
>>> headway.data.permute.__module__
'headway.data.order'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.data.autoscale import Autoscaler as Autoscaler
    from headway.data.cache import TieredCache as TieredCache
    from headway.data.dependent import Dependent as Dependent
    from headway.data.jagged import DedupJagged as DedupJagged
    from headway.data.jagged import Jagged as Jagged
    from headway.data.jagged import dedup as dedup
    from headway.data.job_order import Buffered as Buffered
    from headway.data.job_order import DataShareError as DataShareError
    from headway.data.master import Master as Master
    from headway.data.object_source import ObjectSource as ObjectSource
    from headway.data.object_source import ObjectTarSource as ObjectTarSource
    from headway.data.opportunistic import Opportunistic as Opportunistic
    from headway.data.optimize import Plan as Plan
    from headway.data.optimize import Resources as Resources
    from headway.data.order import permute as permute
    from headway.data.order_choice import Reader as Reader
    from headway.data.order_choice import choose_order as choose_order
    from headway.data.partition import PartitionMap as PartitionMap
    from headway.data.partition import partition_cache as partition_cache
    from headway.data.partitioned import Partitioned as Partitioned
    from headway.data.pipeline import plan as plan
    from headway.data.pipeline import profile as profile
    from headway.data.runtime.fleet import Fleet as Fleet
    from headway.data.runtime.keyed import generator as generator
    from headway.data.runtime.keyed import torch_generator as torch_generator
    from headway.data.runtime.loader import DataLoader as DataLoader
    from headway.data.runtime.loader import DatasetChangedError as DatasetChangedError
    from headway.data.runtime.partitioned import over_ranks as over_ranks
    from headway.data.runtime.pipeline import Pipeline as Pipeline
    from headway.data.runtime.ray_workers import RayFleet as RayFleet
    from headway.data.runtime.select import WithIds as WithIds
    from headway.data.runtime.select import scoring as scoring
    from headway.data.select import LossSelector as LossSelector
    from headway.data.server import DataServer as DataServer
    from headway.data.sessions import cluster_parquet as cluster_parquet
    from headway.data.sessions import session_order as session_order
    from headway.data.source import FolderSource as FolderSource
    from headway.data.source import ParquetSource as ParquetSource
    from headway.data.source import SyntheticJpeg as SyntheticJpeg
    from headway.data.source import TarSource as TarSource
    from headway.data.source import Throttled as Throttled
    from headway.data.strategies import Independent as Independent
    from headway.data.strategies import Shared as Shared

PUBLIC: dict[str, str] = {
    "Autoscaler": "headway.data.autoscale:Autoscaler",
    "Buffered": "headway.data.job_order:Buffered",
    "DataLoader": "headway.data.runtime.loader:DataLoader",
    "DataServer": "headway.data.server:DataServer",
    "DataShareError": "headway.data.job_order:DataShareError",
    "DatasetChangedError": "headway.data.runtime.loader:DatasetChangedError",
    "DedupJagged": "headway.data.jagged:DedupJagged",
    "Dependent": "headway.data.dependent:Dependent",
    "Fleet": "headway.data.runtime.fleet:Fleet",
    "FolderSource": "headway.data.source:FolderSource",
    "Independent": "headway.data.strategies:Independent",
    "Jagged": "headway.data.jagged:Jagged",
    "LossSelector": "headway.data.select:LossSelector",
    "Master": "headway.data.master:Master",
    "ObjectSource": "headway.data.object_source:ObjectSource",
    "ObjectTarSource": "headway.data.object_source:ObjectTarSource",
    "Opportunistic": "headway.data.opportunistic:Opportunistic",
    "ParquetSource": "headway.data.source:ParquetSource",
    "PartitionMap": "headway.data.partition:PartitionMap",
    "Partitioned": "headway.data.partitioned:Partitioned",
    "Pipeline": "headway.data.runtime.pipeline:Pipeline",
    "Plan": "headway.data.optimize:Plan",
    "RayFleet": "headway.data.runtime.ray_workers:RayFleet",
    "Reader": "headway.data.order_choice:Reader",
    "Resources": "headway.data.optimize:Resources",
    "Shared": "headway.data.strategies:Shared",
    "SyntheticJpeg": "headway.data.source:SyntheticJpeg",
    "TarSource": "headway.data.source:TarSource",
    "Throttled": "headway.data.source:Throttled",
    "TieredCache": "headway.data.cache:TieredCache",
    "WithIds": "headway.data.runtime.select:WithIds",
    "choose_order": "headway.data.order_choice:choose_order",
    "cluster_parquet": "headway.data.sessions:cluster_parquet",
    "dedup": "headway.data.jagged:dedup",
    "generator": "headway.data.runtime.keyed:generator",
    "over_ranks": "headway.data.runtime.partitioned:over_ranks",
    "partition_cache": "headway.data.partition:partition_cache",
    "permute": "headway.data.order:permute",
    "plan": "headway.data.pipeline:plan",
    "profile": "headway.data.pipeline:profile",
    "scoring": "headway.data.runtime.select:scoring",
    "session_order": "headway.data.sessions:session_order",
    "torch_generator": "headway.data.runtime.keyed:torch_generator",
}
"""Every lazily loaded public name -> "module:attribute"."""


__getattr__, __dir__ = lazily(__name__, PUBLIC)
