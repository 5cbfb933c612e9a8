"""Input data: where its time goes, what wins it back, and a DataLoader that resumes mid-epoch, on any number of ranks.

Public names are resolved on first use, through one literal table; only those of the loader need torch.

>>> import headway.data
>>> headway.data.permute.__module__
'headway.data.bytes.order'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.data.bytes.object_source import ObjectSource as ObjectSource
    from headway.data.bytes.object_source import ObjectTarSource as ObjectTarSource
    from headway.data.bytes.order import permute as permute
    from headway.data.bytes.source import FolderSource as FolderSource
    from headway.data.bytes.source import ParquetSource as ParquetSource
    from headway.data.bytes.source import SyntheticJpeg as SyntheticJpeg
    from headway.data.bytes.source import TarSource as TarSource
    from headway.data.bytes.source import Throttled as Throttled
    from headway.data.bytes.torch_keyed import generator as generator
    from headway.data.bytes.torch_keyed import torch_generator as torch_generator
    from headway.data.cached.partition import PartitionMap as PartitionMap
    from headway.data.cached.partition import partition_cache as partition_cache
    from headway.data.cached.tiered import TieredCache as TieredCache
    from headway.data.fleet.autoscale import Autoscaler as Autoscaler
    from headway.data.fleet.master import Master as Master
    from headway.data.fleet.ray_workers import RayFleet as RayFleet
    from headway.data.fleet.torch_fleet import Fleet as Fleet
    from headway.data.jagged import DedupJagged as DedupJagged
    from headway.data.jagged import Jagged as Jagged
    from headway.data.jagged import dedup as dedup
    from headway.data.loader.loader import DataLoader as DataLoader
    from headway.data.loader.loader import DatasetChangedError as DatasetChangedError
    from headway.data.orders.choice import Reader as Reader
    from headway.data.orders.choice import choose_order as choose_order
    from headway.data.orders.job_order import Buffered as Buffered
    from headway.data.orders.job_order import DataShareError as DataShareError
    from headway.data.orders.random_orders import Dependent as Dependent
    from headway.data.orders.random_orders import Opportunistic as Opportunistic
    from headway.data.orders.strategies import Independent as Independent
    from headway.data.orders.strategies import Shared as Shared
    from headway.data.partitioned.apply import over_ranks as over_ranks
    from headway.data.partitioned.partitioned import Partitioned as Partitioned
    from headway.data.pipeline.operators import plan as plan
    from headway.data.pipeline.operators import profile as profile
    from headway.data.pipeline.optimize import PipelinePlan as PipelinePlan
    from headway.data.pipeline.optimize import Resources as Resources
    from headway.data.pipeline.pipeline import Pipeline as Pipeline
    from headway.data.selection import LossSelector as LossSelector
    from headway.data.service.stock import DataServer as DataServer
    from headway.data.sessions import cluster_parquet as cluster_parquet
    from headway.data.sessions import session_order as session_order
    from headway.data.torch_selection import WithIds as WithIds
    from headway.data.torch_selection import scoring as scoring

PUBLIC: dict[str, str] = {
    "Autoscaler": "headway.data.fleet.autoscale:Autoscaler",
    "Buffered": "headway.data.orders.job_order:Buffered",
    "DataLoader": "headway.data.loader.loader:DataLoader",
    "DataServer": "headway.data.service.stock:DataServer",
    "DataShareError": "headway.data.orders.job_order:DataShareError",
    "DatasetChangedError": "headway.data.loader.loader:DatasetChangedError",
    "DedupJagged": "headway.data.jagged:DedupJagged",
    "Dependent": "headway.data.orders.random_orders:Dependent",
    "Fleet": "headway.data.fleet.torch_fleet:Fleet",
    "FolderSource": "headway.data.bytes.source:FolderSource",
    "Independent": "headway.data.orders.strategies:Independent",
    "Jagged": "headway.data.jagged:Jagged",
    "LossSelector": "headway.data.selection:LossSelector",
    "Master": "headway.data.fleet.master:Master",
    "ObjectSource": "headway.data.bytes.object_source:ObjectSource",
    "ObjectTarSource": "headway.data.bytes.object_source:ObjectTarSource",
    "Opportunistic": "headway.data.orders.random_orders:Opportunistic",
    "ParquetSource": "headway.data.bytes.source:ParquetSource",
    "PartitionMap": "headway.data.cached.partition:PartitionMap",
    "Partitioned": "headway.data.partitioned.partitioned:Partitioned",
    "Pipeline": "headway.data.pipeline.pipeline:Pipeline",
    "PipelinePlan": "headway.data.pipeline.optimize:PipelinePlan",
    "RayFleet": "headway.data.fleet.ray_workers:RayFleet",
    "Reader": "headway.data.orders.choice:Reader",
    "Resources": "headway.data.pipeline.optimize:Resources",
    "Shared": "headway.data.orders.strategies:Shared",
    "SyntheticJpeg": "headway.data.bytes.source:SyntheticJpeg",
    "TarSource": "headway.data.bytes.source:TarSource",
    "Throttled": "headway.data.bytes.source:Throttled",
    "TieredCache": "headway.data.cached.tiered:TieredCache",
    "WithIds": "headway.data.torch_selection:WithIds",
    "choose_order": "headway.data.orders.choice:choose_order",
    "cluster_parquet": "headway.data.sessions:cluster_parquet",
    "dedup": "headway.data.jagged:dedup",
    "generator": "headway.data.bytes.torch_keyed:generator",
    "over_ranks": "headway.data.partitioned.apply:over_ranks",
    "partition_cache": "headway.data.cached.partition:partition_cache",
    "permute": "headway.data.bytes.order:permute",
    "plan": "headway.data.pipeline.operators:plan",
    "profile": "headway.data.pipeline.operators:profile",
    "scoring": "headway.data.torch_selection:scoring",
    "session_order": "headway.data.sessions:session_order",
    "torch_generator": "headway.data.bytes.torch_keyed:torch_generator",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
