// Whatever streams calls are put on, work on one page is in order: a migration behind the steps
// that read and wrote it, a new owner behind the migration, tables behind their readers.
#include <algorithm>

#include "dense_fixture.hpp"
#include "ordered_backend.hpp"
#include "program_launch.hpp"

namespace sparse_kvcm::testing {
namespace {

using Access = OrderedBackend::Access;

class FenceTest : public DenseTest {
 protected:
  FenceTest() {
    backend = ordered;
    KvCacheManagerConfig c = dense_config();
    c.host_pages = 60;
    use_dense(c);
  }
  Stream any_stream() { return static_cast<Stream>(random_.between(1, 5)); }

  const void* place(std::int32_t group, std::int32_t slot) const {
    const LayerGroupDesc& desc =
        manager->storage()->layout().layer_groups()[static_cast<std::size_t>(group)];
    const MemoryView memory = manager->storage()->pool_memory(desc.pool_group, 0);
    return memory.data + slot * memory.shape[1];
  }
  // What a forward on `stream` does with a request's dense pages: it writes tokens from `from` on.
  void forward(const KvCache& kv, Stream stream, std::int32_t from) {
    for (const std::int32_t group : pages->dense_groups()) {
      const std::vector<std::int32_t> table = kv.get_base_page_indices(group);
      for (std::size_t page = 0; page < table.size(); ++page) {
        if (table[page] < 0) continue;
        const bool written = static_cast<std::int32_t>(page) >= from / kPage;
        ordered->touch(stream, place(group, table[page]), written ? Access::kWrite : Access::kRead);
      }
    }
  }
  // The engine orders work of its own before the manager's next call.
  void all_wait_for(Stream stream) {
    const EventPtr event = ordered->record(stream);
    for (Stream other = 1; other <= 5; ++other) ordered->wait(other, *event);
  }
  void admit() {
    const KvCachePtr kv = request({kNeed, -1});
    const std::int32_t history = random_.between(1, 24);
    import(*kv, history);
    const Stream stream = any_stream();
    if (!kv->resume(stream) || !kv->resize(history, history, stream)) return kv->close();
    forward(*kv, stream, 0);
    all_wait_for(stream);
    batch->add(*kv);
  }
  void step() {
    std::vector<RowTokens> capacities;
    std::vector<std::int32_t> rows;
    for (const KvCachePtr& kv : requests) {
      if (kv->history_length() == kNeed) kv->close();
      if (!kv->row()) continue;
      capacities.push_back({*kv->row(), std::min(kv->history_length() + random_.below(3), kNeed)});
      rows.push_back(*kv->row());
    }
    const Stream early = any_stream();
    (void)batch->resize_tokens(capacities, early);
    for (const std::int32_t row : rows) forward(at_row(row), early, at_row(row).history_length());
    all_wait_for(early);
    batch->publish(any_stream());
    const Stream stream = any_stream();
    batch->wait_ready(stream);
    for (const std::int32_t row : rows) {
      forward(at_row(row), stream, at_row(row).history_length());
      for (std::int32_t group = 0; group < batch->num_layer_groups(); ++group) {
        for (std::int32_t page = 0; page < batch->max_pages(); ++page) {
          ordered->touch(stream, batch->page_table_address(group) + row * batch->max_pages() + page,
                         Access::kRead);
        }
      }
    }
    if (random_.percent(10) && !rows.empty()) at_row(rows.front()).close();  // in the step
    if (random_.percent(10)) return batch->abort_step(stream);
    batch->record_read(rows, stream);
  }
  void change() {
    const KvCachePtr kv = random_.pick(requests);
    const std::int32_t dice = random_.below(10);
    try {
      if (dice < 4) kv->suspend(any_stream());
      if (dice >= 4 && dice < 8 && kv->state() == KvCacheState::kSuspended &&
          kv->resume(any_stream()) && kv->capacity() >= kv->history_length()) {
        batch->add(*kv);
      }
      if (dice == 8) kv->close();
    } catch (const InvalidState&) {
    } catch (const OutOfPages&) {
    }
  }

  std::shared_ptr<OrderedBackend> ordered = std::make_shared<OrderedBackend>();
  Random random_{3};
};

TEST_F(FenceTest, NoTwoAccessesToAPageAreUnorderedWhateverTheStreams) {
  for (std::int32_t n = 0; n < 2000; ++n) {
    std::erase_if(requests, [](const auto& kv) { return kv->state() == KvCacheState::kClosed; });
    if (requests.size() < 4) admit();
    step();
    if (!requests.empty() && random_.percent(50)) change();
    ASSERT_EQ(ordered->num_races(), 0) << "step " << n;
  }
  EXPECT_GT(ordered->num_checks(), 100'000);
}

TEST_F(FenceTest, TheWatcherSeesWorkThatNothingOrders) {
  int place = 0;
  ordered->touch(1, &place, Access::kWrite);
  ordered->touch(2, &place, Access::kRead);
  EXPECT_EQ(ordered->num_races(), 1);
  ordered->wait(2, *ordered->record(1));
  ordered->touch(2, &place, Access::kWrite);
  EXPECT_EQ(ordered->num_races(), 1);
}

}  // namespace
}  // namespace sparse_kvcm::testing
