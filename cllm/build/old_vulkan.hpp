#include <vector>
#include <vulkan/vulkan_core.h>
#ifndef VK_EXT_layer_settings
namespace vk {
enum class LayerSettingTypeEXT { eBool32 };
struct LayerSettingEXT {
    const char * layer;
    const char * name;
    LayerSettingTypeEXT type;
    uint32_t count;
    const void * values;
};
struct LayerSettingsCreateInfoEXT {
    VkStructureType type = static_cast<VkStructureType>(1000496000);
    const void * next = nullptr;
    uint32_t count;
    const LayerSettingEXT * settings;
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & all)
        : count(static_cast<uint32_t>(all.size())), settings(all.data()) {}
};
}
#endif
