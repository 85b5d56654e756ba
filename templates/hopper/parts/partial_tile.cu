        float s[tile_k / 2];
        start_qk(s, q, uniform(consumer.k + stage.index * (k_bytes / 16)));
//@ if pending then
        start_pv(o, p, uniform(consumer.v + stage_before * (v_bytes / 16)));
//@ end
//@ if pending and carry then
        wgmma_wait<1>();
//@ else
        wgmma_wait<0>();
//@ end
        if (lane == 0) barrier_arrive(bar_k_empty(smem, stage.index));
//@ if pending and not carry then
        if (lane == 0) barrier_arrive(bar_v_empty(smem, stage_before));
//@ end
//@ if has_score then
        score_tile(s, args, &work, work.q_start + consumer.row, work.k_start + tile * tile_k + lane % 4 * 2);
//@ end
        if (tile_class == 1) {
            const int column = tile * tile_k + lane % 4 * 2;
//@ if walk == "range" then
            if (__all_sync(~0u, exact)) {
                hide_by_spans(s, keys, column);
            } else {
                hide_by_mask(s, args, &work, consumer.row, column);
            }
//@ else
            hide_by_mask(s, args, &work, consumer.row, column);
//@ end
        }
        const bool may_move[2] = {true, true};
        float rescale[2], part[2];
        const bool moved = move_references(s, &rows, rescale, consumer.to_log2, may_move, slack);
//@ if pending and carry then
        unsigned p_next[tile_k / 4];
        exponentials(s, p_next, &rows, consumer.to_log2, part);
//@ else
        exponentials(s, p, &rows, consumer.to_log2, part);
//@ end
        rows.sum[0] += part[0];
        rows.sum[1] += part[1];
//@ if has_mask then
        barrier_wait(bar_checked(smem, stage.index), stage.parity);
//@ else
        barrier_wait(bar_v_full(smem, stage.index), stage.parity);
//@ end
//@ if pending and carry then
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(bar_v_empty(smem, stage_before));
        copy_p(p, p_next);
//@ end
//@ if carry then
        if (!fresh) begin_o(o, inverse, smem, warpgroup, turn);
        else if (moved) rescale_o(o, rescale);
//@ else
        if (moved) rescale_o(o, rescale);
//@ end
